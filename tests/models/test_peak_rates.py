"""Peak rates by the names that torch gives devices."""

from tests.matrix import each
from vitctl.models.flops import bf16_tflops


@each(
    ("name", "tflops"),
    [
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("A100-SXM4-40GB", 312.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA A10", 125.0),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI250X", 191.5),
    ],
)
def test_bf16_tflops__of_the_device_that_torch_names(name: str, tflops: float) -> None:
    assert bf16_tflops(name) == tflops


@each(
    "name",
    [
        "Tesla V100-SXM2-16GB",
        "Tesla T4",
        "NVIDIA A10G",
        "NVIDIA A10-4Q",
        "GRID A100-10C",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA A100-SXM-64GB",
        "AMD Instinct MI250X/MI250",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA RTX A4000",
        "NVIDIA H20",
        "Fake Card",
    ],
)
def test_bf16_tflops__what_is_not_known_is_not_guessed(name: str) -> None:
    assert bf16_tflops(name) == 0
