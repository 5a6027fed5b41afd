"""Device, dtype, threads and seeds: decided here and nowhere else."""

import hashlib
import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import psutil
import torch

from bdcore.config import ConfigError, DtypeName, RuntimeConfig


@dataclass(frozen=True)
class Runtime:
    device: str
    dtype: str
    """Of the verifier for targets."""
    training_dtype: str
    """Of training's autocast; master weights are float32."""
    grid_dtype: str
    reason: str

    def facts(self) -> dict[str, str]:
        return asdict(self)


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def resolve(config: RuntimeConfig) -> Runtime:
    """The device and dtypes to use, and why. ConfigError when the configured device is not there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device = cuda: PyTorch sees no CUDA device; use cpu or auto")
    device = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if config.threads:
        torch.set_num_threads(config.threads)
    wanted: dict[str, DtypeName] = {
        "targets": config.dtype,
        "training": config.training_dtype,
        "grid": config.grid_dtype,
    }
    chosen = {use: _resolve_dtype(name, device) for use, name in wanted.items()}
    text = ", ".join(f"{use} {dtype} ({reason})" for use, (dtype, reason) in chosen.items())
    return Runtime(device, *(dtype for dtype, _ in chosen.values()), reason=f"{device}: {text}")


def _resolve_dtype(name: DtypeName, device: str) -> tuple[str, str]:
    if name != "auto":
        return name, "configured"
    if device == "cuda":
        return "bfloat16", "CUDA device"
    if multiplies_bfloat16():
        return "bfloat16", "this CPU multiplies bfloat16 in hardware"
    return "float32", "this CPU has no bfloat16 arithmetic"


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 products (AVX512-BF16 or AMX); others emulate them, about six times slower."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("amx_bf16") or found.get("avx512_bf16"))


def seed_for(*path: Any) -> int:
    """A 63-bit seed for a node of the seed tree (study seed, stage, sample): independent of order."""
    return int.from_bytes(hashlib.blake2b(repr(path).encode(), digest_size=8).digest()) >> 1


def environment() -> dict[str, Any]:
    """Hardware and versions, for manifests and reports."""
    packages = ("torch", "transformers", "prefect", "mlflow", "duckdb", "pyarrow")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in packages},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
