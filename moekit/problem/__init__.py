"""The problem that a kernel is composed for, and the weights that it runs on: pure data."""

from moekit.problem.activation import Activation as Activation
from moekit.problem.device import DEVICE_PATTERN as DEVICE_PATTERN
from moekit.problem.device import DeviceSpec as DeviceSpec
from moekit.problem.parallel import ParallelConfig as ParallelConfig
from moekit.problem.parallel import partition as partition
from moekit.problem.problem import DTYPES as DTYPES
from moekit.problem.problem import ActivationFormat as ActivationFormat
from moekit.problem.problem import AdapterSlots as AdapterSlots
from moekit.problem.problem import MoEProblem as MoEProblem
from moekit.problem.quant import SCHEMES as SCHEMES
from moekit.problem.quant import OperandQuant as OperandQuant
from moekit.problem.quant import QuantScheme as QuantScheme
from moekit.problem.weights import ExpertWeights as ExpertWeights
