"""Attacks on clients by a server that is curious about what they upload.

Unlike its neighbours, which are what clients do to a run, these change nothing: they measure how much of a
client's samples, or of who they are, one honest reply gives away, by which layers are in it.
"""

from .inversion import Inversion, Reconstruction, input_of, invert, labels_of
from .membership import Membership, calibrated_scores, loss_scores, membership, same_labels, sample_losses
from .quality import class_means, matched, mse, nearest, psnr, ssim
from .upload import Upload, protected, upload_of

__all__ = [
    "Inversion",
    "Membership",
    "Reconstruction",
    "Upload",
    "calibrated_scores",
    "class_means",
    "input_of",
    "invert",
    "labels_of",
    "loss_scores",
    "matched",
    "membership",
    "mse",
    "nearest",
    "protected",
    "psnr",
    "same_labels",
    "sample_losses",
    "ssim",
    "upload_of",
]
