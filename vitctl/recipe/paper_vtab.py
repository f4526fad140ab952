"""The paper's results on VTAB-1k, to compare with ours.

Paper: Appendix D.10, Table 9
"""

from collections.abc import Mapping

COLUMNS = ("H/14 JFT", "L/16 JFT", "L/16 I21k")

# Top-1 accuracy in percent, a column for each model above.
TABLE_9: Mapping[str, tuple[float, float, float]] = {
    "caltech101": (95.3, 95.4, 90.8),
    "cifar100": (85.5, 81.9, 84.1),
    "dtd": (75.2, 74.3, 74.1),
    "flowers102": (99.7, 99.7, 99.3),
    "pets": (97.2, 96.7, 92.7),
    "sun397": (65.0, 63.5, 61.0),
    "svhn": (88.9, 87.4, 80.9),
    "patch_camelyon": (83.3, 83.6, 82.5),
    "eurosat": (96.7, 96.5, 95.6),
    "resisc45": (91.4, 89.7, 85.2),
    "retinopathy": (76.6, 77.1, 75.3),
    "clevr-count": (91.7, 86.4, 70.3),
    "clevr-dist": (63.8, 63.1, 56.1),
    "dmlab": (53.1, 49.7, 41.9),
    "dsprites-loc": (79.4, 74.5, 74.7),
    "dsprites-ori": (63.3, 60.5, 64.9),
    "kitti-dist": (84.5, 82.2, 79.9),
    "smallnorb-azim": (33.2, 36.2, 30.5),
    "smallnorb-elev": (51.2, 51.1, 41.7),
}

# The other networks of Figure 2, which prints no numbers: the mean of the 19 tasks, then of the three groups.
# None: not published.
OTHERS: Mapping[str, tuple[float | None, ...]] = {
    "BiT-L": (76.29, None, None, None),
    "VIVI": (70.5, None, None, None),
    "S4L": (67.97, 73.57, 83.12, 55.48),
}
OTHERS_SOURCES = (
    "BiT-L: Table 2. VIVI: BiT, Table 1. S4L: means of the tasks of Sup-Rotation-100% in VTAB's published "
    "results, ResNet50; that "
    "these are the figure's networks is an inference for VIVI and S4L."
)
