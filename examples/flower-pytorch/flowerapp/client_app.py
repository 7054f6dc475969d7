"""What a client does when the server asks: train, or evaluate, the model on its own digits."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flowerapp import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came with the message."""
    net = task.Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    batches, _ = _data(context)
    loss = task.train(net, batches, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(batches.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model that came with the message."""
    net = task.Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, batches = _data(context)
    loss, accuracy = task.test(net, batches)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(batches.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


def _data(context: Context):
    node = context.node_config
    return task.load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])
