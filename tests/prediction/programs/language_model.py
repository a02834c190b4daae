"""Truncated backpropagation through time, trained by hand: no optimizer at all."""

import torch
from torch import nn

VOCABULARY, WIDTH, BATCH, LENGTH = 200, 64, 20, 15
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = nn.RNN(WIDTH, WIDTH, 2, nonlinearity="tanh")
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids, hidden):
        output, hidden = self.cells(self.drop(self.encoder(ids)), hidden)
        return torch.log_softmax(self.decoder(self.drop(output)).view(-1, VOCABULARY), dim=1), hidden


def batches(text):
    for start in range(0, text.size(0) - LENGTH - 1, LENGTH):
        yield text[start : start + LENGTH], text[start + 1 : start + 1 + LENGTH].view(-1)


def main():
    text = torch.randint(0, VOCABULARY, (3000, BATCH)).to(device)
    model = Recurrent().to(device)
    criterion = nn.NLLLoss()
    rate = 20.0
    for epoch in range(40):
        model.train()
        total = 0.0
        hidden = torch.zeros(2, BATCH, WIDTH, device=device)
        for ids, targets in batches(text):
            model.zero_grad()
            hidden = hidden.detach()
            output, hidden = model(ids, hidden)
            loss = criterion(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-rate)
            total += loss.item()
        print(epoch, total)


if __name__ == "__main__":
    main()
