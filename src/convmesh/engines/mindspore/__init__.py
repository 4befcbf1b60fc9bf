"""The MindSpore engine. Importing this package imports no MindSpore, but prepares the environment for it.

MindSpore and its libraries read their settings once, when they are loaded or first used.
"""

from convmesh.engines.mindspore.kernels import prepare

prepare()
