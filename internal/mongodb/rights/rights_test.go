package rights

import "testing"

func TestCovers(t *testing.T) {
	t.Parallel()

	for _, c := range []struct {
		have, want Resource
		covered    bool
	}{
		{Resource{DB: "a", Collection: "b"}, Resource{DB: "a", Collection: "b"}, true},
		{Resource{DB: "a", Collection: "b"}, Resource{DB: "a", Collection: "c"}, false},
		{Resource{DB: "a"}, Resource{DB: "a", Collection: "b"}, true},
		{Resource{DB: "a"}, Resource{DB: "a"}, true},
		{Resource{DB: "a"}, Resource{DB: "b", Collection: "b"}, false},
		{Resource{DB: "a"}, Resource{DB: "a", Collection: "system.users"}, false},
		{Resource{Collection: "b"}, Resource{DB: "a", Collection: "b"}, true},
		{Resource{Collection: "b"}, Resource{DB: "a", Collection: "c"}, false},
		{Resource{Collection: "b"}, Resource{DB: "a"}, false},
		{Resource{}, Resource{DB: "a", Collection: "b"}, true},
		{Resource{}, Resource{}, true},
		{Resource{DB: "a"}, Resource{}, false},
		{Resource{}, Resource{Cluster: true}, false},
		{Resource{Cluster: true}, Resource{}, false},
		{Resource{Cluster: true}, Resource{Cluster: true}, true},
		{Resource{Any: true}, Resource{Cluster: true}, true},
		{Resource{Any: true}, Resource{DB: "a", Collection: "b"}, true},
	} {
		if c.have.Covers(c.want) != c.covered {
			t.Errorf("%+v covers %+v: %v", c.have, c.want, !c.covered)
		}
	}
}
