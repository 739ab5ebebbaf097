package scheduled

import (
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/waiting"
)

// N3: what has become due is claimed in smaller transactions where the server is too slow for one of all: it is late, and comes.
func TestN03_WhatIsDueIsClaimedInPartsWhereTheServerIsSlow(t *testing.T) {
	t.Parallel()
	p := plan(t)
	ids := p.schedule(120, 0)
	slow := &stacktest.Hasty{Coll: p.coll, Done: present("claim"), Most: 5}
	x := p.take(func(_ *waiting.FinisherConfig, c *ScheduledConfig) { slow.Fence, c.Fencer = c.Fencer, slow })
	x.settles(len(ids))
	x.end()
	x.once(time.Time{}, ids...)
	if n := slow.Late.Load(); n == 0 || n > 40 {
		t.Errorf("%d attempts in vain", n)
	}
}
