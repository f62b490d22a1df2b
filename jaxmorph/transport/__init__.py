"""The host-side data plane: moves a link's messages through host memory, beside the accelerator."""
