"""A stand-in for the engine's package: classes alike, with few fields, and a talkative import."""

__version__ = "1.4.0rc1"
print("[TensorRT-LLM] stand-in version", __version__)
