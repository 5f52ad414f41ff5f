"""python -m hsgd.agent"""

import os
import sys

from hsgd.agent.agent_program import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's rendezvous may keep a thread that waits
