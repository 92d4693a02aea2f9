"""Pipeline parallelism: layers in a row, split into stages that run on different ranks."""
