"""ZeRO-Offload and ZeRO-Infinity: train with optimizer states and parameters on the CPU or on disk. See README.md."""
