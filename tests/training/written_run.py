"""Run directories with checkpoints, as runs leave them."""

from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.config import Config, dump_config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.training.resume import checkpoint_folder

CONFIG = {
    "run": {"dir": "runs/was", "steps": 20},
    "model": {"width": 32, "num_layers": 4, "weights": "somewhere"},
    "parallelism": {"stages": 2, "layers": [1, 3]},
}
LAYERS = (range(1), range(1, 4))


def write_run(directory, steps, config=CONFIG, layers=LAYERS, vocab_size=256):
    """Write a run's configuration and checkpoints, with one small file in each part."""
    config = config if isinstance(config, Config) else Config.model_validate(config)
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(config))
    folder = checkpoint_folder(config, directory)
    for step in steps:
        for number in range(len(layers)):
            stage_path(folder.unfinished(step), number).mkdir(parents=True)
            (stage_path(folder.unfinished(step), number) / "array").write_text(f"{step} {number}")
            folder.seal_part(step, number)
        folder.commit(Manifest(step, layers, vocab_size, (), config, data=DataDigest(9, "ab")))
    return directory
