"""`jaxmorph sample`: text from a run's saved model."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxmorph.config import Config
from jaxmorph.data import Tokenizer, is_token_array, open_tokenizer
from jaxmorph.errors import UserError
from jaxmorph.stage.model import GivesLogits, Params, join_stages, model_logits, with_logits
from jaxmorph.training.saved_model import SamplingSettings, continuation, load_saved_model


def sample(
    run_dir: Path,
    prompt: str,
    settings: SamplingSettings,
    *,
    step: int | None = None,
    tokenizer: str | None = None,
) -> str:
    """A prompt and its continuation by a run's model, on one device.

    Args:
        run_dir: The run directory; it may have been trained on any number of stages.
        prompt: The text to continue; an empty one is the beginning of a document.
        settings: How tokens are drawn, and how many.
        step: How many updates the checkpoint has; None: the latest.
        tokenizer: In place of the run's own `data.tokenizer`.

    Returns:
        The text; it is shorter than asked for where the model ends the document.

    Raises:
        UserError: If there is no such run, its model gives no logits, or the prompt can't be
            encoded.
    """
    saved = load_saved_model(run_dir, step)
    model = with_logits(saved.model)
    words = _tokenizer(saved.config, tokenizer)
    ids = _encoded(prompt, words)
    params = join_stages(saved.stages)
    sequence_length = saved.config.data.sequence_length
    _check_ids(ids, _vocab_size(model, params, sequence_length))
    drawn: list[int] = []
    for token in continuation(
        model,
        params,
        ids,
        settings,
        sequence_length=sequence_length,
        num_known=words.vocab_size,
    ):
        if token == words.separator:
            break
        drawn.append(token)
    return prompt + _decoded_after(ids, drawn, words)


def _tokenizer(config: Config, named: str | None) -> Tokenizer:
    if named is not None:
        return open_tokenizer(named)
    if is_token_array(config.data.path) and config.data.tokenizer == "bytes":
        raise UserError(
            f"--tokenizer: got none, expected what made the run's token array, {config.data.path}: "
            "the path of a tokenizer.json, or bytes"
        )
    return open_tokenizer(config.data.tokenizer)


def _encoded(prompt: str, tokenizer: Tokenizer) -> list[int]:
    try:
        ids = tokenizer.encode([prompt.encode()]).tolist()
    except UnicodeEncodeError as error:
        raise UserError(f"--prompt: got {prompt!r}, expected text in UTF-8") from error
    if ids:
        return ids
    if tokenizer.separator is None:
        raise UserError(
            f"--prompt: got {prompt!r}, expected some text: the tokenizer has no token for the "
            "beginning of a document"
        )
    return [tokenizer.separator]


def _vocab_size(model: GivesLogits, params: Params, sequence_length: int) -> int:
    tokens = jax.ShapeDtypeStruct((1, sequence_length), jnp.int32)
    return jax.eval_shape(lambda p, t: model_logits(model, p, t), params, tokens).shape[-1]


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if max(ids) >= vocab_size:
        raise UserError(
            f"--prompt: got token {max(ids):,}, expected ids below {vocab_size:,}, the model's "
            "vocabulary (is it the tokenizer of the run's data?)"
        )


def _decoded_after(prompt: list[int], drawn: list[int], tokenizer: Tokenizer) -> str:
    """The text of the drawn tokens as it follows that of the prompt's."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *drawn])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(drawn)
