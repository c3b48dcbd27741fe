"""Run once a rank: the gradients of two micro-batches by GradientSum and by torch's own DistributedDataParallel.

Usage: ddp_worker.py OUT MODEL... Saves, from the first rank and for each model, both gradients in one piece each, and
how many buckets ours went in.
"""

import sys
from contextlib import nullcontext

import torch
from scenes import random_batch
from test_step import Double
from torch.nn.parallel import DistributedDataParallel

from detector import distributed
from detector.loss.criterion import DetectionLoss
from detector.model.network import build_network
from detector.step.gradients import GradientSum
from detector.step.statistics import set_modes

BOXES = ([[3, 0], [1, 5]], [[0, 0], [9, 2]])  # of each image of each micro-batch, by rank


def network_of(model):
    network = build_network(model, nc=2, seed=0).double()
    set_modes(network, freeze_norms=True)
    return network


def loss_of(criterion, network, boxes, seed):
    """The loss of a micro-batch: a sum, as the step's is."""
    batch = Double(random_batch(boxes, seed=seed))
    return sum(branch.terms.sum() for branch in criterion(network(batch.network_input()), batch))


def gradient(network):
    return torch.cat([one.grad.flatten() for one in network.parameters() if one.grad is not None])


def both(model):
    ours, theirs = network_of(model), network_of(model)
    gradients, parallel = GradientSum(ours, bucket_bytes=40_000), DistributedDataParallel(theirs)
    criterion, rank = DetectionLoss(ours.head), distributed.rank()
    mine = list(enumerate(BOXES[rank], start=10 * rank))
    with gradients.summed():
        for seed, boxes in mine:
            if boxes is mine[-1][1]:
                gradients.send_as_they_come()
            loss_of(criterion, ours, boxes, seed).backward()
    for seed, boxes in mine:
        with nullcontext() if boxes is mine[-1][1] else parallel.no_sync():
            loss_of(criterion, parallel, boxes, seed).backward()
    whole = gradient(theirs) * distributed.world_size()
    return {"ours": gradient(ours), "theirs": whole, "buckets": len(gradients._buckets)}


def main(out, *models):
    with distributed.process_group(torch.device("cpu")):
        found = [both(model) for model in models]
        if distributed.is_main():
            torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
