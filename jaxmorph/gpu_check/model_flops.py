"""How much arithmetic a GPT-2 stage's programs must do, and how much a device can do."""

from jaxmorph.gpu_check.settings import Sizes

_PEAK_TFLOPS = (  # the first name that is part of the device's; parts of a family come first
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("A100", 312.0),
)


def peak_tflops(device_kind: str) -> float | None:
    """Dense bfloat16 TFLOP/s by the maker's data sheet; None for a device that isn't in the table.

    Args:
        device_kind: As JAX names the device.
    """
    return next((peak for name, peak in _PEAK_TFLOPS if name in device_kind), None)


def model_flops(sizes: Sizes, attention: str = "xla") -> dict[str, float]:
    """The floating-point operations of each program's matrix products on one microbatch.

    A product of a layer's weights with one token's activations is 2 FLOPs for each of the 12 width²
    weights: the forward does it once, and the backward twice, for the input's gradient (in B) and
    for the weights' (in W). Attention's two products are 2 x 2 x sequence x width FLOPs a token,
    over the whole square of positions, as XLA computes it; cuDNN leaves out what the mask hides, so
    that a token has half of the sequence before it on average. The backward has four such products,
    all in B. Nothing else is counted: no normalisation, no softmax, and nothing that is computed
    again, as cuDNN's backward does with the first product.

    Args:
        sizes: Of the stage, without embedding and head.
        attention: By what it is computed, "xla" or "cudnn".

    Returns:
        FLOPs by program: F, B, W, BW, and "plain", which is forward and backward in one.
    """
    tokens = sizes.microbatch_size * sizes.sequence_length
    weights = tokens * sizes.num_layers * 2.0 * 12 * sizes.width**2
    length = sizes.sequence_length
    seen = (length + 1) / 2 if attention == "cudnn" else length
    pairs = tokens * sizes.num_layers * 2.0 * 2 * seen * sizes.width
    return {
        "F": weights + pairs,
        "B": weights + 2 * pairs,
        "W": weights,
        "BW": 2 * weights + 2 * pairs,
        "plain": 3 * weights + 3 * pairs,
    }
