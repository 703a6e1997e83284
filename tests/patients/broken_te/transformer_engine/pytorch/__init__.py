"""What 2.14.1 raises beside the cuBLAS of torch 2.11 (NVIDIA/TransformerEngine#2504)."""

raise ImportError(
    "libtransformer_engine.so: undefined symbol: "
    "cublasLtGroupedMatrixLayoutInit_internal, version "
    "libcublasLt.so.13"
)
