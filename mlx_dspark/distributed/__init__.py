"""Several processes that run one model, over `mx.distributed`."""
