"""The files of a model folder, read without trust and written shard by shard. `model` decides how they become a model.

    reader.py     tensors by name
    header.py     the header of a safetensors file
    schemes.py    how each matrix is stored, and its value
    quantize.py   from a float checkpoint to FP8 blocks or INT8

May import: config, kernels, the ground."""
