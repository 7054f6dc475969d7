"""The names that come with fedplat: what each is, where it lives and which publication it follows.

One line per part: name, module and attribute below the kind's package, summary, source.
"""

from __future__ import annotations

_KRUM = "Blanchard et al., NeurIPS 2017"
_YIN = "Yin et al., ICML 2018"
_MUD_HOG = "Gupta et al., ESORICS 2022, released code"
_BACKDOOR = "Bagdasaryan et al., AISTATS 2020"
_FANG = "Fang et al., USENIX Security 2020"
_DNC = "Shejwalkar and Houmansadr, NDSS 2021"
_RSA = "Li et al., AAAI 2019 (RSA)"
_FEDAVG = "McMahan et al., AISTATS 2017"

# fmt: off
PACKAGES = {
    "strategies": "fedplat.strategies",
    "pre-aggregators": "fedplat.strategies.preaggregators",
    "selectors": "fedplat.strategies.selectors",
    "attacks": "fedplat.clients.attacks",
    "models": "fedplat.models",
    "datasets": "fedplat.datasets",
    "partitions": "fedplat.datasets.partition",
}

# Names of the form "prefix:rest": what is called with the rest to get the thing behind such a name, what
# the rest is called, and a summary.
PREFIXED = {
    "datasets": {
        "hf": ("fedplat.datasets.hugging_face:data_set", "REPOSITORY",
               "of the Hugging Face Hub, or a folder (needs the extra hf)"),
    },
    "partitions": {
        "hf": ("fedplat.datasets.hugging_face_partitions:partitioner", "PARTITIONER",
               "a class of flwr-datasets, such as DirichletPartitioner (needs the extra hf)"),
    },
}

BUILT_IN: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "strategies": (
        ("mean", "baselines:Mean", "weighted or plain mean of the updates",
         "McMahan et al., AISTATS 2017 (FedAvg)"),
        ("median", "baselines:Median", "coordinate-wise median", f"{_YIN}, option I"),
        ("trimmed-mean", "baselines:TrimmedMean", "coordinate-wise mean without the extremes",
         f"{_YIN}, option II"),
        ("krum", "robust:Krum", "the model nearest its neighbours", _KRUM),
        ("multi-krum", "robust:MultiKrum", "mean of the best by Krum's score", _KRUM),
        ("bulyan", "robust:Bulyan", "repeated Krum, then the mean around the median",
         "El Mhamdi et al., ICML 2018"),
        ("meamed", "robust:Meamed", "mean of the values nearest the median", "Xie et al., 2018"),
        ("geometric-median", "robust:GeometricMedian", "least sum of distances to the clients",
         "Pillutla et al., 2019 (RFA)"),
        ("centered-clipping", "robust:CenteredClipping", "updates clipped around the last model",
         "Karimireddy et al., ICML 2021"),
        ("norm-clipping", "robust:NormClipping", "mean of updates of bounded length", "Sun et al., 2019"),
        ("rfa", "robust:RFA", "a few steps towards the geometric median", "Pillutla et al., 2019"),
        ("foolsgold", "similarity:FoolsGold", "clients that push the same way share their weight",
         "Fung et al., RAID 2020"),
        ("rffl", "similarity:RFFL", "mean weighted by reputation; the worst are dropped",
         "Xu and Lyu, 2020 (RFFL), authors' code"),
        ("fltrust", "similarity:FLTrust", "trust from the server's own clean data", "Cao et al., NDSS 2021"),
        ("flame", "filtering:Flame", "clipped mean of the majority cluster, with noise",
         "Nguyen et al., USENIX Security 2022"),
        ("signguard", "filtering:SignGuard", "filters by length and by mix of signs",
         "Xu et al., ICDCS 2022"),
        ("dnc", "filtering:DivideAndConquer", "mean without outliers along the widest direction",
         _DNC),
        ("sign-vote", "filtering:SignVote", "each coordinate follows the majority's sign",
         "Bernstein et al., ICLR 2019"),
        ("mda", "subset_rules:MinimumDiameter", "mean of the n - f clients of smallest diameter",
         "El Mhamdi et al., PODC 2020"),
        ("monna", "subset_rules:Monna", "mean of the n - f clients nearest a trusted one",
         "Farhadkhani et al., ICML 2023"),
        ("caf", "subset_rules:CovarianceFilter", "weights lowered along the top eigenvector",
         "Allouah et al., ICML 2025"),
        ("smea", "subset_rules:SmallestEigenvalue", "mean of the n - f with smallest top eigenvalue",
         "Allouah et al., ICML 2023"),
        ("residual-reweighting", "subset_rules:ResidualReweighting",
         "weights by residuals from a robust line", "Fu et al., 2019"),
        ("mud-hog", "mud_hog:MudHog", "long and short histories of updates tell attackers apart",
         "Gupta et al., ESORICS 2022; partly inferred"),
        ("fed-credit", "fed_credit:FedCredit", "mean weighted by an earned credibility",
         "Chen et al., 2024 (arXiv 2405.11758); formulas partly inferred"),
    ),
    "pre-aggregators": (
        ("bucketing", ":Bucketing", "means of random buckets", "Karimireddy et al., ICLR 2022"),
        ("nnm", ":NearestNeighbourMixing", "mean with the nearest neighbours",
         "Allouah et al., AISTATS 2023"),
        ("clipping", ":Clipping", "updates of bounded length", "Sun et al., 2019"),
        ("arc", ":AdaptiveClipping", "the longest updates clipped to the others'",
         "Allouah et al., 2024 (ARC)"),
    ),
    "selectors": (
        ("all", ":AllClients", "everyone takes part in every round", ""),
        ("fraction", ":RandomFraction", "a random fraction each round", _FEDAVG),
    ),
    "attacks": (
        ("sign-flip", "sign_flip:SignFlip", "sends the update (or the weights) with the sign turned",
         _RSA),
        ("gaussian-noise", "reply:GaussianNoise", "adds noise to the trained model", _MUD_HOG),
        ("same-value", "reply:SameValue", "sends the same number for every parameter", _RSA),
        ("scaling", "reply:Scaling", "enlarges its update, up to replacing the model", _BACKDOOR),
        ("random-weights", "reply:RandomWeights", "sends weights that have seen no data", "Lin et al., 2019"),
        ("free-rider", "reply:FreeRider", "sends the model back as it came", "Fraboni et al., AISTATS 2021"),
        ("inflated-count", "reply:InflatedCount", "claims more samples than it has", "Portnoy et al., 2020"),
        ("not-finite", "reply:NotFinite", "sends NaN or infinity", ""),
        ("label-flip", "data:LabelFlip", "labels one class, or several, as another",
         "Tolpegin et al., ESORICS 2020; Gupta et al., ESORICS 2022"),
        ("label-reverse", "data:LabelReverse", "labels every class c as C - 1 - c",
         _FANG),
        ("random-labels", "data:RandomLabels", "labels at random", ""),
        ("backdoor", "data:Backdoor", "a square in the corner means the target class",
         "Gu et al., 2017 (BadNets); Bagdasaryan et al., AISTATS 2020"),
        ("noisy-features", "data:NoisyFeatures", "trains on noisy pixels", ""),
        ("blur", "unreliable:Blur", "unreliable: skips batches and sees blurred images", _MUD_HOG),
        ("low-resolution", "unreliable:LowResolution", "unreliable: sees coarse images",
         "Gupta et al., ESORICS 2022; details inferred"),
        ("few-steps", "unreliable:FewSteps", "unreliable: stops training early",
         "Li et al., MLSys 2020 (FedProx)"),
        ("alie", "collusion:ALittleIsEnough", "mean minus z deviations, within the honest spread",
         "Baruch et al., NeurIPS 2019"),
        ("ipm", "collusion:InnerProduct", "a small negative multiple of the honest mean",
         "Xie et al., UAI 2019"),
        ("mimic", "collusion:Mimic", "all colluders copy one honest client", "Karimireddy et al., ICLR 2022"),
        ("min-max", "optimised:MinMax", "as far out as the furthest honest pair", _DNC),
        ("min-sum", "optimised:MinSum", "within the largest sum of squared distances", _DNC),
        ("fang-median", "optimised:FangMedian", "beyond all honest values, against median and trimmed mean",
         _FANG),
        ("fang-krum", "optimised:FangKrum", "the furthest step back that Krum still chooses", _FANG),
        ("gradient-ascent", "ascent:GradientAscent", "climbs the loss instead of descending it",
         "Shejwalkar et al., IEEE S&P 2022, without the projection"),
    ),
    "models": (
        ("softmax", "dense:softmax_regression", "multinomial logistic regression", ""),
        ("mlp", "dense:mlp", "multi-layer perceptron", ""),
        ("cnn-fedavg", "cnn:fedavg_cnn", "two 5x5 convolutions, 1,663,370 parameters on MNIST", _FEDAVG),
        ("cnn-hfl", "cnn:hfl_cnn", "small two-convolution net, 21,840 parameters on MNIST",
         "HierFAVG's released code"),
        ("cnn-mudhog-mnist", "cnn:mudhog_mnist_cnn",
         "LeNet-like net for 32x32 grey images, 81,194 parameters", _MUD_HOG),
        ("cnn-mudhog-fashion", "cnn:mudhog_fashion_cnn",
         "six-convolution net for 28x28 grey images, 165,106 parameters", _MUD_HOG),
        ("cnn-cifar", "cnn:cifar_cnn", "three 3x3 convolutions with pooling for 32x32 images", ""),
        ("resnet18", "resnet:resnet18", "ResNet-18 with a 3x3 stem, GroupNorm or BatchNorm",
         "He et al., CVPR 2016; Hsieh et al., ICML 2020 for GroupNorm"),
        ("resnet34", "resnet:resnet34", "ResNet-34 with a 3x3 stem, GroupNorm or BatchNorm",
         "He et al., CVPR 2016; Hsieh et al., ICML 2020 for GroupNorm"),
        ("char-lstm", "lstm:char_lstm", "two-layer character LSTM", _FEDAVG),
    ),
    "datasets": (
        ("digits", "digits:load", "1,797 handwritten digits of 8x8 pixels, ship inside scikit-learn",
         "Alpaydin and Kaynak, UCI 1998"),
        ("mnist", "torchvision_sets:load_mnist", "handwritten digits, 28x28", "LeCun et al., 1998"),
        ("fashion-mnist", "torchvision_sets:load_fashion_mnist", "clothing, 28x28 grey", "Xiao et al., 2017"),
        ("cifar10", "torchvision_sets:load_cifar10", "ten kinds of objects, 32x32 colour",
         "Krizhevsky, 2009"),
        ("image-folder", "image_folder:load", "your own images: root/{train,test}/<class>/*", ""),
        ("shakespeare", "shakespeare:load", "next character in plays; speakers are clients",
         "Karpathy's Tiny Shakespeare; task of McMahan et al., AISTATS 2017"),
    ),
    "partitions": (
        ("iid", ":iid", "shuffled, equal sizes", ""),
        ("dirichlet", ":dirichlet", "each class spread over the clients by Dirichlet(alpha)",
         "Yurochkin et al., ICML 2019"),
        ("dirichlet-client", ":dirichlet_client",
         "equal sizes, each client's class mix drawn from Dirichlet(alpha)", "Hsu et al., 2019"),
        ("shards", ":shards", "k label shards per client", _FEDAVG),
        ("quantity", ":quantity", "label-balanced on average, log-normal sizes", ""),
        ("natural", ":natural", "one client per speaker, writer or user", ""),
        ("mud-hog", ":mud_hog", "the split of the MUD-HoG experiments, to the sample",
         _MUD_HOG),
    ),
}
# fmt: on
