"""A replay buffer of twelve episodes: it fills for twelve steps, and from then on the oldest is replaced."""

import random

import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"


class ReplayBuffer:
    def __init__(self, capacity):
        self.capacity = capacity
        self.episodes = []
        self.next = 0

    def add(self, episode):
        if len(self.episodes) < self.capacity:
            self.episodes.append(episode)
        else:
            self.episodes[self.next] = episode
        self.next = (self.next + 1) % self.capacity

    def sample(self, rng):
        return rng.choice(self.episodes)


@torch.no_grad()
def play(policy, length=256):
    states = torch.randn(length, 64, device=device)
    actions = policy(states).argmax(1)
    return states, actions, (actions == states[:, :8].argmax(1)).float()


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    policy = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    replay = ReplayBuffer(capacity=12)
    for step in range(1, 41):
        replay.add(play(policy))
        states, actions, rewards = replay.sample(rng)
        advantage = rewards - rewards.mean()
        loss = (F.cross_entropy(policy(states), actions, reduction="none") * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: reward {rewards.mean().item():.3f}, {len(replay.episodes)} episodes")


if __name__ == "__main__":
    main()
