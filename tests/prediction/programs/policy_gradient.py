"""REINFORCE: many calls of the policy without a backward, then one step for the episode."""

import torch
from torch import nn, optim
from torch.distributions import Categorical

device = "cuda" if torch.cuda.is_available() else "cpu"


class World:
    """Something to act in, on the host."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def act(self, action):
        return torch.randn(4, generator=self.generator), 1.0 + 0.1 * action


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 128)
        self.action = nn.Linear(128, 2)
        self.logs, self.rewards = [], []

    def forward(self, x):
        return torch.softmax(self.action(torch.relu(self.hidden(x))), dim=1)


def choose(policy, state):
    distribution = Categorical(policy(state.float().unsqueeze(0).to(device)))
    action = distribution.sample()
    policy.logs.append(distribution.log_prob(action))
    return action.item()


def finish(policy, optimizer):
    returns, total = [], 0.0
    for reward in reversed(policy.rewards):
        total = reward + 0.99 * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    losses = [-log * each for log, each in zip(policy.logs, returns, strict=True)]
    optimizer.zero_grad()
    torch.cat(losses).sum().backward()
    optimizer.step()
    del policy.rewards[:], policy.logs[:]


def main():
    policy = Policy().to(device)
    optimizer = optim.Adam(policy.parameters(), lr=1e-2)
    for episode in range(1000):
        world = World(episode)
        state = torch.zeros(4)
        for _ in range(60):
            state, reward = world.act(choose(policy, state))
            policy.rewards.append(reward)
        finish(policy, optimizer)
        print(episode)


if __name__ == "__main__":
    main()
