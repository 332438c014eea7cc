"""Triton kernels of our own, and what they cost on paper.

Only a file in this folder imports triton, and such a file is imported when one of its kernels is first called: without
CUDA nothing here but `cost` is ever read. The forms that offer the kernels to `dispatch` stand one folder up.
"""
