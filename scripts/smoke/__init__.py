"""Parts of gpu_smoke.py and multi_gpu_smoke.py."""
