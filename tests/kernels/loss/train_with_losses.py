"""Run by test_loss_training.py: two processes train one model with DistributedDataParallel (gloo).

Arguments: rank, file that the processes meet at. Prints the gradients' fingerprints as JSON.
"""

import json
import sys

import torch
from torch import distributed, nn

from taut_kernels.loss.linear_cross_entropy import linear_cross_entropy
from taut_kernels.loss.linear_kl import linear_kl

VOCABULARY, HIDDEN = 40, 8


class Head(nn.Module):
    """Embedding and head, with a cross entropy and a distillation loss on top."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens, target, teacher_x, teacher_weight):
        x = torch.tanh(self.embedding(tokens))
        loss = linear_cross_entropy(
            x, self.head.weight, target, bias=self.head.bias, chunk_size=3, reduction="sum"
        )
        return loss + linear_kl(
            x, self.head.weight, teacher_x, teacher_weight, bias=self.head.bias, reduction="sum"
        )


def batch(rank):
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    target = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    teacher_x = torch.randn(2, 5, HIDDEN, generator=generator)
    teacher_weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(9))
    return tokens, target, teacher_x, teacher_weight


def main(rank, meeting):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Head()
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(2):
            parallel.zero_grad()
            parallel(*batch(rank)).backward()
    finally:
        distributed.destroy_process_group()
    found = {name: p.grad.flatten().tolist() for name, p in model.named_parameters()}
    # Alone, over both batches: what the average of the two has to be.
    torch.manual_seed(0)
    alone = Head()
    (sum(alone(*batch(other)) for other in range(2)) / 2).backward()
    wanted = {name: p.grad.flatten().tolist() for name, p in alone.named_parameters()}
    sys.stdout.write(json.dumps({"found": found, "wanted": wanted}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
