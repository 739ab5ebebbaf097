package config

import (
	"slices"
	"strings"
	"testing"
)

func TestRoles(t *testing.T) {
	t.Parallel()
	env := []string{"OUTRELAY_MONGODB_URI=mongodb://m/shop", "OUTRELAY_KAFKA_BROKERS=k:1"}
	for _, c := range []struct {
		set []string
		// want contains the roles. It is nil if a problem is reported.
		want []string
	}{
		{nil, []string{"relay", "cleaner", "admin"}},
		{[]string{"roles=relay"}, []string{"relay"}},
		{[]string{"roles=[relay, cleaner]"}, []string{"relay", "cleaner"}},
		{[]string{"roles=admin", "http.admin.anonymous=viewer"}, []string{"admin"}},
		{[]string{"roles=admin"}, nil},
		{[]string{"roles=cleaner"}, nil},
		{[]string{"roles=[]"}, nil},
		{[]string{"roles=[relay, janitor]"}, nil},
	} {
		cfg, _, err := Load("", env, c.set)
		if (err == nil) != (c.want != nil) || err == nil && !slices.Equal(cfg.Roles, c.want) || err != nil && !strings.Contains(err.Error(), "roles") {
			t.Errorf("%v: %v, %v", c.set, cfg.Roles, err)
		}

		for _, r := range allRoles {
			if err == nil && cfg.HasRole(r) != slices.Contains(c.want, r) {
				t.Errorf("%v: is %s: %v", c.set, r, cfg.HasRole(r))
			}
		}
	}
}
