import torch
from tests.harness import models
def f():
    m=models.build("plain")
    n=[]
    def backend(g,i):
        n.append(g); return g
    for l in m.layers: l.compile(backend=backend)
    b=models.make_batch("plain",seed=0,rank=0)
    m(**b)["loss"].backward(); a=len(n)
    torch._dynamo.reset()
    l=models.Layer(); l.compile(backend=backend); l(torch.randn(2,5,11))
    from torch._dynamo.utils import counters
    return a, len(n), {k:dict(v) for k,v in counters.items()}
if __name__=="__main__":
    from tests.harness.ranks import run_ranks
    from tests import zz_dbg
    print(run_ranks(zz_dbg.f,1))
