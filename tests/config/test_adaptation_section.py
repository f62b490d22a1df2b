import pytest

from jaxmorph.config import Config


def test_an_order_inside_a_step_is_kept_unless_the_configuration_says_otherwise():
    assert Config().adaptation.intra_step == "off"
    chosen = Config.model_validate({"adaptation": {"intra_step": "auto"}})
    assert chosen.adaptation.intra_step == "auto"


def test_another_word_is_refused():
    with pytest.raises(ValueError, match=r"adaptation.intra_step"):
        Config.model_validate({"adaptation": {"intra_step": "yes"}})
