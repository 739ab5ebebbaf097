package scheduled

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// N3: if the server is too slow for one transaction, due envelopes are claimed in smaller ones. They are late, but they
// are sent.
func TestN03_DueEnvelopesAreClaimedInPartsOnASlowServer(t *testing.T) {
	t.Parallel()
	p := newPlanned(t)
	ids := p.schedule(120, 0)
	slow := &stacktest.Hasty{Coll: p.coll, Most: 5}
	x := p.takeOver(func(c *setUp) { slow.Fence, c.Fencer = c.Fencer, slow })
	x.waitSettled(len(ids))
	x.release()
	x.checkSentOnce(time.Time{}, ids...)
	if n := slow.Late.Load(); n == 0 || n > 40 {
		t.Errorf("%d attempts in vain", n)
	}
}
