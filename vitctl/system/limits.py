"""Limits on input, in bytes unless the name says otherwise; docs/bounds.md describes each."""

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30

# Images
IMAGE_FILE = 64 * _MIB
PIXELS = 89_478_485  # Pillow's
PICTURE = _GIB
LARGE = 192 * _MIB
HELD = 64 * _MIB
SMALL_SIDE = 64
SMALL_IMAGES = 1280 * _MIB
SCANS = 100
SCANNED = _GIB
# Shards and indexes
SHARD = 64 * _GIB
MEMBER_HEADER = 64 * _KIB
TAR_COMMENT = 16 * _MIB
LABEL_FILE = _MIB
INDEX = 256 * _MIB
SHARD_LIST = 256 * _MIB
# Original files of data sets
LIST_FILE = 256 * _MIB
TABLE = _GIB
CLASSES = 1_000_000
RECORD = 256 * _MIB
UNPACKED = _GIB
# Recipes and runs
RECIPE = _MIB
RECIPE_LINE = 16 * _KIB
DEPTH = 32
RUN_FILE = 64 * _MIB
LOG_LINE = 16 * _MIB
# Weights
WEIGHTS = 64 * _GIB
WEIGHTS_GROWTH = 16
TENSORS = 20_000
# Servers
HTTP_SECONDS = 60
HTTP_BYTES_A_SECOND = 1024
# Requests to our server
REQUEST = 64 * _MIB
REQUESTS = 512 * _MIB
REQUEST_IMAGES = 64
WAITING_IMAGES = 256
CONNECTIONS = 256
REQUEST_SECONDS = 30
