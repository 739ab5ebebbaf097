package process_test

import (
	"bufio"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// A process that runs one of two slots has all of its memory for it, and when it has to run both, a half for each.
func TestN28_MemoryFollowsTheSlotsThatRunHere(t *testing.T) {
	t.Parallel()
	b := setup(t)
	listen := freeAddress(t)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	budget := func() map[string]string {
		res, err := client.Get("http://" + listen + "/metrics")
		if err != nil {
			return nil
		}
		defer res.Body.Close()
		out := map[string]string{}
		lines := bufio.NewScanner(io.LimitReader(res.Body, 8<<20))
		for lines.Scan() {
			if rest, ok := strings.CutPrefix(lines.Text(), `outrelay_budget_bytes{slot="`); ok {
				slot, value, _ := strings.Cut(rest, `"} `)
				out[slot] = value
			}
		}
		return out
	}

	const all, half = "3.3554432e+07", "1.6777216e+07"
	b.start("slots=2", "node=a", "http.listen="+listen)
	b.waitWatchers("both of a", sharesAre(map[string]int{"a": 2}))
	stacktest.Eventually(t, "each slot has half of the memory", func() bool { return maps.Equal(budget(), map[string]string{"0of2": half, "1of2": half}) })
	stop := b.start("slots=2", "node=b")
	b.waitWatchers("one each, and a has all of its memory for its own", func(now map[string]admin.SlotStatus) bool {
		want := map[string]string{}
		for s, w := range now {
			want[s] = half // as a standby
			if w.Node == "a" {
				want[s] = all
			}
		}
		return sharesAre(map[string]int{"a": 1, "b": 1})(now) && maps.Equal(budget(), want)
	})

	b.appendNumbered(0, 60)
	if err := stop(); err != nil {
		t.Fatal(err)
	}

	b.waitWatchers("both of a again", func(now map[string]admin.SlotStatus) bool { return sharesAre(map[string]int{"a": 2})(now) })
	stacktest.Eventually(t, "each slot has half of the memory again", func() bool { return maps.Equal(budget(), map[string]string{"0of2": half, "1of2": half}) })
	b.checkExactly(60)
}
