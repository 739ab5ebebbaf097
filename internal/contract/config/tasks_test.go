package config

import (
	"slices"
	"strings"
	"testing"
)

func TestTasks(t *testing.T) {
	t.Parallel()
	env := []string{"OUTRELAY_MONGODB_URI=mongodb://m/shop", "OUTRELAY_KAFKA_BROKERS=k:1"}
	for _, c := range []struct {
		set []string
		// want contains the tasks. It is nil if a problem is reported.
		want []string
	}{
		{nil, []string{"relay", "cleaner", "admin"}},
		{[]string{"tasks=relay"}, []string{"relay"}},
		{[]string{"tasks=[relay, cleaner]"}, []string{"relay", "cleaner"}},
		{[]string{"tasks=admin", "http.admin.anonymous=viewer"}, []string{"admin"}},
		{[]string{"tasks=admin"}, nil},
		{[]string{"tasks=cleaner"}, nil},
		{[]string{"tasks=[]"}, nil},
		{[]string{"tasks=[relay, janitor]"}, nil},
	} {
		cfg, _, err := Load("", env, c.set)
		if (err == nil) != (c.want != nil) || err == nil && !slices.Equal(cfg.Tasks, c.want) || err != nil && !strings.Contains(err.Error(), "tasks") {
			t.Errorf("%v: %v, %v", c.set, cfg.Tasks, err)
		}

		for _, r := range allTasks {
			if err == nil && cfg.HasTask(r) != slices.Contains(c.want, r) {
				t.Errorf("%v: is %s: %v", c.set, r, cfg.HasTask(r))
			}
		}
	}
}
