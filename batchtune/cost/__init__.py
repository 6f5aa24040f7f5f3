"""What a batch shape costs: models of peak memory and step time, and the frontier between measurements."""

from batchtune.cost.frontier import Frontier, largest_max_batch_length
from batchtune.cost.models import fit_cost, predict

__all__ = ["Frontier", "fit_cost", "largest_max_batch_length", "predict"]
