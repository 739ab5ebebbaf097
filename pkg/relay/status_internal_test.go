package relay

import "testing"

// A problem that lasts is no new status, although its text contains its age and the latest error.
func TestAProblemThatLastsIsNoNewStatus(t *testing.T) {
	t.Parallel()
	last := Status{Phase: Owner, Ready: true, Reasons: []string{"kafka reachable: i/o timeout of port 1 (for 1s)"}}
	for name, c := range map[string]struct {
		status Status
		want   bool
	}{
		"the same":        {last, false},
		"an older one":    {Status{Phase: Owner, Ready: true, Reasons: []string{"kafka reachable: i/o timeout of port 2 (for 9s)"}}, false},
		"another problem": {Status{Phase: Owner, Ready: true, Reasons: []string{"stuck: i/o timeout of port 1 (for 1s)"}}, true},
		"one more":        {Status{Phase: Owner, Ready: true, Reasons: append([]string{"stuck: no response (for 1s)"}, last.Reasons...)}, true},
		"none":            {Status{Phase: Owner, Ready: true}, true},
		"not ready":       {Status{Phase: Owner, Reasons: last.Reasons}, true},
		"another phase":   {Status{Phase: Standby, Ready: true, Reasons: last.Reasons}, true},
	} {
		if got := c.status.differsFrom(last); got != c.want {
			t.Errorf("%s: got %t, want %t", name, got, c.want)
		}
	}
}
