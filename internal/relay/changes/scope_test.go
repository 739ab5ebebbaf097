package changes

import (
	"strings"
	"testing"
)

func TestScopeChoosesTheNarrowestStream(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		patterns string
		kind     Kind
		name     string
	}{
		{"shop.outbox", Collection, "shop.outbox"},
		{"shop.outbox shop.outbox", Collection, "shop.outbox"},
		{"shop.out.box", Collection, "shop.out.box"},
		{"shop.outbox shop.audit", Database, "shop.audit,shop.outbox"},
		{"shop.outbox_*", Database, "shop.outbox_*"},
		{"shop.outbox shop.*", Database, "shop.*"},
		{"shop.outbox crm.outbox", Cluster, "crm.outbox,shop.outbox"},
		{"tenant_*.outbox", Cluster, "tenant_*.outbox"},
		{"*.outbox tenant_*.outbox a.outbox", Cluster, "*.outbox"},
		{"a**.outbox", Cluster, "a*.outbox"},
		{"shop.outbox_?", Database, "shop.outbox_?"},
		{"shop?.outbox shop1.outbox", Cluster, "shop?.outbox"},
		{"shop.a? shop.a*", Database, "shop.a*"},
	} {
		s := scopeOf(t, strings.Fields(c.patterns)...)
		if s.Kind() != c.kind || s.String() != c.name {
			t.Errorf("%s: %s stream of %s, want %s of %s", c.patterns, s.Kind(), s, c.kind, c.name)
		}
	}
}

func TestN27_OwnCollectionsAreNeverWatched(t *testing.T) {
	t.Parallel()
	s := scopeOf(t, "*.*")
	for _, ns := range []string{
		"shop.outbox_dead", "outrelay.watchers", "admin.x", "local.oplog.rs", "config.y",
		"shop.system.views",
	} {
		db, coll, _ := strings.Cut(ns, ".")
		if s.Matches([]byte(db), []byte(coll)) {
			t.Errorf("%s is watched", ns)
		}
	}

	if !s.Matches([]byte("shop"), []byte("outbox")) {
		t.Error("shop.outbox is not watched")
	}
	for _, own := range []string{
		"shop.outbox_dead", "outrelay.watchers", "outrelay.*", "local.*", "*.x_dead",
		"inbox.in", "shop.inbox", "shop.inbox_offsets", "shop.order_sagas", "*.saga_types",
	} {
		if _, err := ParseScope([]string{own}, "outrelay.*", "inbox.in"); err == nil {
			t.Errorf("ParseScope accepted %s", own)
		}
	}
}

func TestParseScopeReportsEveryProblem(t *testing.T) {
	t.Parallel()
	_, err := ParseScope([]string{"outbox", ".x", "a.", "a b.c", "a.$x", "ok.outbox"}, "nodot")
	if err == nil {
		t.Fatal("ParseScope returned no error")
	}
	if n := len(strings.Split(err.Error(), "\n")); n != 6 {
		t.Errorf("%d problems, want 6:\n%v", n, err)
	}
	if _, err := ParseScope(nil); err == nil {
		t.Error("ParseScope accepted an empty list")
	}
}

func TestPipelineHash(t *testing.T) {
	t.Parallel()
	same := scopeOf(t, "a.x", "b.x").PipelineHash()
	if scopeOf(t, "b.x", "a.x", "a.x").PipelineHash() != same {
		t.Error("the order of patterns changes the hash")
	}

	seen := map[string]string{}
	for _, p := range []string{"a.x", "b.x", "a.x a.y", "a.x b.y", "a.y b.x", "*.x", "a*.x", "a.*"} {
		h := scopeOf(t, strings.Fields(p)...).PipelineHash()
		if other, found := seen[h]; found {
			t.Errorf("%q and %q have the same hash", p, other)
		}
		seen[h] = p
	}
}

func TestMatchesAllocatesNothing(t *testing.T) {
	s := scopeOf(t, "shop.outbox", "tenant_*.outbox", "x.*y*")
	db, coll := []byte("tenant_42"), []byte("outbox")
	if n := testing.AllocsPerRun(100, func() { s.Matches(db, coll) }); n != 0 {
		t.Errorf("%v allocations, want 0", n)
	}
	if !s.Matches(db, coll) || s.Matches([]byte("tenant42"), coll) {
		t.Error("want tenant_42.outbox watched and tenant42.outbox not watched")
	}
}

// The state collections in a watched database, even the only one, never match.
func TestN27_StateCollectionsInAWatchedDatabase(t *testing.T) {
	t.Parallel()
	for _, patterns := range [][]string{{"shop.*"}, {"*.*"}, {"shop.outbox", "shop.out*"}} {
		s, err := ParseScope(patterns, "shop.outrelay_*")
		if err != nil {
			t.Fatal(err)
		}
		if !s.Matches([]byte("shop"), []byte("outbox")) {
			t.Errorf("%q does not match shop.outbox", patterns)
		}
		if s.Matches([]byte("shop"), []byte("outrelay_waiting")) {
			t.Errorf("%q matches shop.outrelay_waiting", patterns)
		}
	}
	if _, err := ParseScope([]string{"shop.outrelay_audit"}, "shop.outrelay_*"); err == nil {
		t.Error("ParseScope accepted a state collection")
	}
}

func scopeOf(t testing.TB, patterns ...string) *Scope {
	t.Helper()
	s, err := ParseScope(patterns, "outrelay.*")
	if err != nil {
		t.Fatal(err)
	}
	return s
}
