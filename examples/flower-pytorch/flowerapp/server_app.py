"""What the server does: start a strategy, and test the model after every round."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch.utils.data import DataLoader

# With Flower's own strategy this line is: from flwr.serverapp.strategy import FedAvg as Strategy
from fedplat.strategies import FedCredit as Strategy
from flowerapp import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and print what came out."""
    result = run(grid, context.run_config)
    for number, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f}")


def run(grid: Grid, run_config) -> Result:
    """Run the rounds on any grid, with the settings of ``pyproject.toml``."""
    strategy = Strategy(fraction_evaluate=run_config["fraction-evaluate"])
    return strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.initial_model().state_dict()),
        train_config=ConfigRecord({"lr": run_config["learning-rate"]}),
        num_rounds=run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model on digits that no client has."""
    net = task.Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = task.test(net, DataLoader(task.load_split("test"), batch_size=64))
    return MetricRecord({"accuracy": accuracy, "loss": loss})
