"""Diseases of GEMM shapes."""
