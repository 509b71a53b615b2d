import sys

sys.exit("no licence for this device")
