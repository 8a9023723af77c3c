"""The compiled part of torch_kvq; all other metadata stands in pyproject.toml.

``TORCH_KVQ_SKIP_EXT=1`` leaves the compiled part out: the operators then run as plain PyTorch.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
TORCH_TARGET_VERSION = "0x020a000000000000"  # the stable ABI of PyTorch 2.10
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # has no limited API


def find(pattern: str) -> list[str]:
    """Paths relative to the root that match `pattern`, the kernels' own C++ tests left out."""
    paths = (path.relative_to(ROOT) for path in ROOT.glob(pattern))
    return sorted(p.as_posix() for p in paths if not p.parts[1].startswith("test"))


def extension() -> dict:
    """The arguments of `setup` that build ``torch_kvq._C``."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

    flags = [
        "-std=c++17",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
    ]
    # GCC takes the undefined operands of its own AVX-512 intrinsics for mistakes.
    flags += [
        "-Wall",
        "-Wextra",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
    ]
    flags += [f"-isystem{path}" for path in include_paths()]
    module = CppExtension(
        "torch_kvq._C",
        sources=find("csrc/*.cpp") + find("ops_cpu/**/*.cpp"),
        depends=find("csrc/*.h") + find("ops_cpu/**/*.h"),
        include_dirs=[str(ROOT)],
        extra_compile_args={"cxx": flags},
        py_limited_api=not FREE_THREADED,
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**({} if os.environ.get("TORCH_KVQ_SKIP_EXT") == "1" else extension()))
