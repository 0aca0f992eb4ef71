"""Figures of one H100 with 16 cores, as they were measured, and the simulated device that is to reproduce them."""

from gpu_simulation.device import DeviceFigures

H100 = DeviceFigures(
    name="H100",
    launch_s=31e-6,
    view_s=8e-6,
    product_flops=560e12,
    memory_bytes_per_s=3e12,
    kernel_s=3e-6,
    link_bytes_per_s=55e9,
    host_bytes_per_s=5e9,
    attention_share=0.5,
    host_s=20e-6,
    call_s=7e-3,
    wait_s=100e-6,
    contended=3.0,
)
