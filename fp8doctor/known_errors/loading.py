"""Messages of FP8 libraries that cannot be loaded."""

from __future__ import annotations

from fp8doctor.known_errors.known_error import KnownError

COMMON = "transformer_engine/common/__init__.py"
CUDNN_PATH = (
    'export LD_LIBRARY_PATH=$(python -c "import nvidia.cudnn as c; print(c.__path__[0])")/lib'
    "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
)

LOADING = (
    KnownError(
        says="libtransformer_engine.so: undefined symbol: cublasLt...",
        pattern=r"libtransformer_engine\S{0,80}: undefined symbol: cublasLt",
        cause="Transformer Engine was linked against a newer cuBLAS than the one that torch brings.",
        lines='pip install --no-build-isolation "transformer-engine[pytorch]>=2.17,<2.20"   # 2.20 needs '
        "cuDNN 9.12",
        versions="Transformer Engine 2.13.0 to 2.16.1 beside the cuBLAS of torch 2.11",
        source="the dynamic loader; NVIDIA/TransformerEngine#2504, symbols read in the released libraries",
        codes=("ENV004", "ENV005"),
    ),
    KnownError(
        says="libcudnn...: undefined symbol",
        pattern=r"libcudnn\S{0,40}: undefined symbol|undefined symbol: \S{0,200}cudnn",
        cause="Parts of two cuDNN versions are mixed in one process: pip's and the system's.",
        lines=f"{CUDNN_PATH}   # or import transformer_engine before cuDNN is used",
        versions="any",
        source="the dynamic loader; pytorch#119989",
        codes=("ENV004",),
    ),
    KnownError(
        says="libcudnn...: cannot open shared object file; cudnn shared object not found",
        pattern=r"libcudnn\S{0,40}: cannot open shared object|cudnn shared object not found",
        cause="The loader finds no cuDNN of this version; in FP8 jobs it is Transformer Engine that wants "
        "one.",
        lines=f"{CUDNN_PATH}   # where pip's cuDNN is of the version that is named",
        versions="the second text from Transformer Engine 2.11 on",
        source=f"the dynamic loader; {COMMON}:433 (2.20.2); NVIDIA/TransformerEngine#1853",
        codes=("ENV004",),
    ),
    KnownError(
        says="nvrtc shared object not found (or curand, cublas, cudart)",
        pattern=r"\b(nvrtc|curand|cublas|cudart) shared object not found",
        cause="Transformer Engine found this CUDA library neither in a CUDA toolkit nor among pip's "
        "packages.",
        lines="pip install nvidia-cuda-nvrtc nvidia-curand nvidia-cublas nvidia-cuda-runtime   # with CUDA "
        "12 "
        "each ends in -cu12; or export CUDA_HOME=/usr/local/cuda",
        versions="Transformer Engine 2.11 and newer",
        source=f"{COMMON}:376 and 433 (2.20.2)",
        codes=("ENV004",),
    ),
    KnownError(
        says="Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is ...",
        pattern=r"Transformer Engine requires cuDNN [\d.]+ or later",
        cause="Transformer Engine refuses a cuDNN before 9.12 from 2.20 on; torch 2.8 to 2.10 bring 9.10 "
        "from pip.",
        lines="pip install --upgrade nvidia-cudnn-cu12   # with CUDA 13 nvidia-cudnn-cu13; or "
        '"transformer-engine[pytorch]<2.20"',
        versions="Transformer Engine 2.20 and newer",
        source=f"{COMMON}:40 (2.20.2); NVIDIA/TransformerEngine#3236",
        codes=("ENV004", "ENV005"),
    ),
    KnownError(
        says="undefined symbol: _ZN3c10...",
        pattern=r"undefined symbol: _Z\w{0,200}?(?<!\d)(3c10\w|5torch\d|2at\d)",
        cause="The compiled extension was built for another torch.",
        lines="pip install --force-reinstall --no-cache-dir --no-deps --no-build-isolation "
        "transformer_engine_torch   # or the package whose .so file the text names",
        versions="any; flash-attn, vLLM and every other extension of torch give the same text",
        source="the dynamic loader; NVIDIA/TransformerEngine#1684",
        codes=("ENV004",),
    ),
    KnownError(
        says="No module named 'transformer_engine_torch'; Found empty `transformer-engine` meta package",
        pattern=r"No module named '?transformer_engine_torch|Could not find shared object file for "
        r"Transformer Engine torch"
        r"|empty `transformer-engine` meta package",
        cause="Transformer Engine's torch extension, which is built from source, is not installed.",
        lines='pip install --no-build-isolation "transformer-engine[pytorch]<2.20"   # 2.20 needs cuDNN 9.12',
        versions="Transformer Engine 2.5 and newer",
        source=f"{COMMON}:155 and 270 (2.20.2)",
        codes=("ENV004",),
    ),
    KnownError(
        says="Transformer Engine package version mismatch",
        pattern=r"Transformer ?Engine package version mismatch",
        cause="Transformer Engine's distributions have different versions.",
        lines='pip install --force-reinstall --no-build-isolation "transformer-engine[pytorch]<2.20"   # '
        "2.20 needs cuDNN 9.12",
        versions="Transformer Engine 2.5 and newer",
        source=f"{COMMON}:207 and 262 (2.20.2)",
        codes=("ENV004",),
    ),
    KnownError(
        says="module 'transformer_engine' has no attribute 'pytorch'",
        pattern=r"module 'transformer_engine' has no attribute 'pytorch'",
        cause="Importing Transformer Engine's torch part failed, and its __init__ kept the ImportError to "
        "itself.",
        lines='python -c "import transformer_engine.pytorch"   # says the real reason',
        versions="Transformer Engine 1.0 to 2.20",
        source="Python; transformer_engine/__init__.py catches ImportError (1.0 to 2.20.2)",
        codes=("ENV004",),
    ),
)
"""In FP8 jobs it is Transformer Engine that loads these libraries."""
