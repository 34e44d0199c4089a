"""Train a CNN in the style of 2017. Several lines fail today: compare 92_loss_curve.py."""

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.data import DataLoader, Dataset

from accel_demo.data import packaged_set

BATCH_SIZE = 64


class DictSet(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        return {"image": image, "label": label}


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        features = self.conv(x).flatten(1)
        return self.out(features), features


def train():
    torch.manual_seed(0)
    train_loader = DataLoader(DictSet(packaged_set("train")), BATCH_SIZE, shuffle=True)
    cnn = CNN()
    cnn.cuda()
    optimizer = torch.optim.Adam(cnn.parameters())
    loss_func = nn.CrossEntropyLoss()
    losses = []
    for data in train_loader:
        image = Variable(data["image"]).float().cuda()
        label = Variable(data["label"]).type(torch.LongTensor)
        label = label.resize(BATCH_SIZE).cuda()
        output = cnn(image)[0]
        loss = loss_func(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.data[0])
    return losses


def main():
    plt.plot(train())
    plt.show()


if __name__ == "__main__":
    main()
