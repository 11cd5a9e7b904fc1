"""The trainings of bench_training.py."""

# The methods by name: classes of `training.methods`, which imports torch.
METHODS = {
    "dense": "Dense",
    "fp16": "Half",
    "powersgd-2": "PowerSGD2",
    "powersgd-4": "PowerSGD4",
    "local-sgd": "LocalSGD",
    "gradwire-hook": "Hook",
    "gradwire-udp": "Udp",
    "gradwire-thin": "UdpThin",
    "gradwire-every4": "UdpEvery4",
    "gradwire-async": "UdpAsync",
    "dense-adamw": "AdamWDense",
    "gradwire-adamw": "AdamWUdp",
    "gradwire-adamw-every4": "AdamWEvery4",
}
