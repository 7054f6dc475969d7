"""Sub-models of different sizes: narrower and shallower parts of a model that share its weights.

::

    plan = plan_of(module, sample_shape)     # what can be left out; from the module's structure
    cut = plan.prefix(0.5)                   # what is kept; also window, random, full
    part = plan.index_map(cut, layout)       # where it lies in the model's vector
    sub = part.extract(model)                # what the client gets, as a smaller FlatArrays
    small = shrink(module, plan, cut.sizes)  # the client's module, whose layout is part.layout
    new, covered = part.restore(sub, model)  # the model with the sub-model put back

What a sub-model costs is told by ``cutting_costs.CutCosts``.

Source of prefixes, scaler and statistics: Diao, Ding and Tarokh, "HeteroFL", ICLR 2021; of windows: Alam et
al., "FedRolex", NeurIPS 2022; of random units: Caldas et al., "Expanding the Reach of Federated Learning by
Reducing Client Resource Requirements", 2018.
"""

from .cutting_maps import IndexMap, IndexMaps
from .cutting_plan import ArrayAxes, Axis, Cut, CutPlan, Group, Sizes, Stage
from .cutting_shrink import Scaler, shrink
from .cutting_statistics import freeze_batch_norm, reestimate_batch_norm
from .cutting_trace import plan_of

__all__ = [
    "ArrayAxes",
    "Axis",
    "Cut",
    "CutPlan",
    "Group",
    "IndexMap",
    "IndexMaps",
    "Scaler",
    "Sizes",
    "Stage",
    "freeze_batch_norm",
    "plan_of",
    "reestimate_batch_norm",
    "shrink",
]
