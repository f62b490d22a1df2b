"""What NVIDIA's driver tells, in files as its kernel module has them."""

import pytest

from jaxmorph.machine.nvidia import nvidia_facts

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n"
INFORMATION = "Model: \t\t NVIDIA H800\nIRQ:   \t\t 191\nBus Type: \t PCIe\n"


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "version").write_text(VERSION + "GCC version:  gcc 13\n")
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:{number}8:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION)
    return tmp_path


def told(driver):
    return {fact.name: fact for fact in nvidia_facts(driver)}


def test_the_driver_is_told_with_its_gpus(driver):
    found = told(driver)
    assert found["NVIDIA's driver"].found == "580.65.06"
    assert (found["its GPUs"].found, found["its GPUs"].works) == ("2 x NVIDIA H800", True)


def test_without_the_driver_there_is_nothing_to_tell(tmp_path):
    assert told(tmp_path) == {}


def test_a_driver_without_a_gpu_is_no_good(tmp_path):
    (tmp_path / "version").write_text(VERSION)
    fact = told(tmp_path)["its GPUs"]
    assert (fact.found, fact.works, fact.note) == ("none", False, "it has found none")


def test_a_gpu_that_does_not_say_what_it_is_is_counted(driver):
    (driver / "gpus" / "0000:08:00.0" / "information").write_text("IRQ: 1\n")
    assert told(driver)["its GPUs"].found == "1 x unknown, 1 x NVIDIA H800"
