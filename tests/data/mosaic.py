"""mosaicml-streaming's own reader, writer and compression: the independent truth of ours."""

from __future__ import annotations

import sys

from hybridtron.storage.mosaic import import_alone

UPLOAD = "streaming.base.storage.upload"
sys.modules.setdefault(UPLOAD, import_alone(UPLOAD))  # where MDSWriter, even of a local folder, looks for it
compression = import_alone("streaming.base.compression")
MDSReader = import_alone("streaming.base.format.mds.reader").MDSReader
MDSWriter = import_alone("streaming.base.format.mds.writer").MDSWriter
UPLOAD = "streaming.base.storage.upload"
sys.modules[UPLOAD] = import_alone(UPLOAD)  # where MDSWriter, even of a local folder, looks for it
