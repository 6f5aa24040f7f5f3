from epochs.conftest import real_dynamic_bucketed_batch

__all__ = ["real_dynamic_bucketed_batch"]
