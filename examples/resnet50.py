"""ResNet-50: the network of the benchmarks, on images that are made up.

PJRT_DEVICE=CPU python examples/resnet50.py --fake_data --image_size 32 --batch_size 8 --examples 32
"""

from typing import Any

import torch
import torch.nn.functional as F
from program import options, positive, run_program
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep

CLASSES = 1000
BLOCKS, WIDTHS, EXPANSION = (3, 4, 6, 3), (64, 128, 256, 512), 4
SMALLEST_IMAGE = 32  # halved five times on its way through the network


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution and the batch norm that follows it, which makes a bias of its own useless."""
    padding = kernel // 2
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """Narrow, convolve, widen; what came in is added to what comes out."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.narrow = convolution(inputs, width, 1)
        self.convolve = convolution(width, width, 3, stride)
        self.widen = convolution(width, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)
        # Every block begins as the identity, which lets a deep network train from the start.
        nn.init.zeros_(self.widen[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.convolve(F.relu(self.narrow(x))))
        return F.relu(self.widen(inner) + self.shortcut(x))


class ResNet50(nn.Module):
    """Takes images as bytes [B, 3, height, width]: a quarter of the copying that floats would need."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = convolution(3, WIDTHS[0], 7, stride=2)
        blocks: list[nn.Module] = []
        inputs = WIDTHS[0]
        for stage, (count, width) in enumerate(zip(BLOCKS, WIDTHS, strict=True)):
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, stride=2 if stage and not block else 1))
                inputs = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images.float() / 127.5 - 1))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.blocks(x)
        return self.head(x.mean(dim=(2, 3)))


def make_fake_images(examples: int, image_size: int, seed: int) -> TensorDataset:
    """A colour for each of a few classes, under noise: little to look at, and enough to learn from."""
    colours = torch.rand(10, 3, 1, 1, generator=torch.Generator().manual_seed(0)) * 255
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(colours), (examples,), generator=generator)
    images = torch.empty(examples, 3, image_size, image_size, dtype=torch.uint8)
    for index in range(examples):  # one at a time: as floats, all of them would need four times the memory
        noise = 32 * torch.randn(3, image_size, image_size, generator=generator)
        images[index] = (colours[labels[index]] + noise).clamp(0, 255).to(torch.uint8)
    return TensorDataset(images, labels)


class ImageNet(lockstep.Task):
    """ResNet-50 and the shapes of ImageNet, or smaller ones."""

    def __init__(self, image_size: int = 224, examples: int = 512, classes: int = CLASSES) -> None:
        if image_size < SMALLEST_IMAGE:
            raise ValueError(f"image_size must be at least {SMALLEST_IMAGE}, got {image_size}")
        self.image_size, self.examples, self.classes = image_size, examples, classes

    def model(self) -> nn.Module:
        return ResNet50(self.classes)

    def train_data(self) -> Dataset[Any]:
        return make_fake_images(self.examples, self.image_size, seed=1)

    def val_data(self) -> Dataset[Any]:
        return make_fake_images(max(self.examples // 4, 1), self.image_size, seed=2)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        images, labels = batch
        logits = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(dim=1) == labels).float(),
        }


def main() -> None:
    parser = options("Trains a ResNet-50.", batch_size=128, examples=512, lr=0.02)
    parser.add_argument("--fake_data", action="store_true", required=True, help="made-up images; there are no others")
    parser.add_argument("--image_size", type=positive, default=224, help=f"{SMALLEST_IMAGE} or more")
    chosen = parser.parse_args()
    if chosen.image_size < SMALLEST_IMAGE:
        parser.error(f"--image_size must be at least {SMALLEST_IMAGE}, got {chosen.image_size}")
    run_program(ImageNet(chosen.image_size, chosen.examples), chosen)


if __name__ == "__main__":
    main()
