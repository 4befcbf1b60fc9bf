"""Networks as framework-free graphs of operators, and one table of rules for each kind of operator."""

from convmesh.graph.blocks import Block, block, blocks, choose_blocks
from convmesh.graph.costs import Cost
from convmesh.graph.difference import differences
from convmesh.graph.graph import Edge, Graph, Node, Parameter
from convmesh.graph.listing import Listing, Row, list_graph
from convmesh.graph.recomputation import Repeated, kept_with, recomputation_cost, repeated
from convmesh.graph.rules import RULES, Rule, node_cost, node_splits, output_shapes, saved_activations, total_cost
from convmesh.graph.saved import Activations
from convmesh.graph.splits import SPLITS, Splits

__all__ = [
    "RULES",
    "SPLITS",
    "Activations",
    "Block",
    "Cost",
    "Edge",
    "Graph",
    "Listing",
    "Node",
    "Parameter",
    "Repeated",
    "Row",
    "Rule",
    "Splits",
    "block",
    "blocks",
    "choose_blocks",
    "differences",
    "kept_with",
    "list_graph",
    "node_cost",
    "node_splits",
    "output_shapes",
    "recomputation_cost",
    "repeated",
    "saved_activations",
    "total_cost",
]
