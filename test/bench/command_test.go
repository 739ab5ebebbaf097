//go:build unix

package bench

import "testing"

// TestBenchCommand runs the whole benchmark at a small size, including failover, and decodes its JSON object
// like a user.
func TestBenchCommand(t *testing.T) {
	t.Parallel()
	var r struct {
		RawStream  float64 `json:"raw_stream_eps"`
		RawProduce float64 `json:"raw_produce_eps"`
		Both       float64 `json:"both_eps"`
		Drain      float64 `json:"drain_eps"`
		Ratio      float64 `json:"drain_ratio"`
		CPU        float64 `json:"cpu_s_per_million"`
		RSS        float64 `json:"peak_rss_mb"`
		OtherCPU   float64 `json:"other_cpu_pct"`

		ForeignEPS   float64 `json:"foreign_eps"`
		ForeignRatio float64 `json:"foreign_ratio"`
		// Pointers, because their values may be 0 or -1.
		ForeignCPU    *float64 `json:"foreign_cpu_s_per_million"`
		ForeignMongod *float64 `json:"foreign_mongod_cpu_s_per_million"`

		Latency []struct {
			Rate int     `json:"rate"`
			P50  float64 `json:"p50_ms"`
			P99  float64 `json:"p99_ms"`
			P999 float64 `json:"p999_ms"`
		} `json:"latency"`
		Failover struct {
			Kill struct {
				N   int     `json:"n"`
				P50 float64 `json:"p50_ms"`
			} `json:"kill"`
			Term struct {
				N int `json:"n"`
			} `json:"term"`
			Events     int `json:"events"`
			Lost       int `json:"lost"`
			Duplicates int `json:"duplicates"`
			OutOfOrder int `json:"out_of_order"`

			IdleRSS float64 `json:"idle_rss_mb"`
			IdleCPU float64 `json:"idle_cpu_pct"`
		} `json:"failover"`
	}
	runBench(t, &r, "--events", "3000", "--rates", "50,200", "--seconds", "1", "--runs", "1", "--failover", "1", "--ttl", "2s", "--foreign")
	for name, v := range map[string]float64{"raw_stream_eps": r.RawStream, "raw_produce_eps": r.RawProduce, "both_eps": r.Both, "drain_eps": r.Drain, "drain_ratio": r.Ratio} {
		if v <= 0 {
			t.Errorf("%s is %v", name, v)
		}
	}

	if r.ForeignEPS <= 0 || r.ForeignRatio <= 0 || r.ForeignCPU == nil || r.ForeignMongod == nil {
		t.Errorf("documents of another writer: %v/s, ratio %v, CPU %v and %v", r.ForeignEPS, r.ForeignRatio, r.ForeignCPU, r.ForeignMongod)
	}
	if r.OtherCPU != -1 && (r.OtherCPU < 0 || r.OtherCPU > 100 || r.CPU <= 0 || r.RSS < 5) {
		t.Errorf("CPU of others %v %%, CPU %v s per million, memory %v MB", r.OtherCPU, r.CPU, r.RSS)
	}
	if len(r.Latency) != 2 || r.Latency[0].Rate != 50 || r.Latency[1].Rate != 200 {
		t.Fatalf("latencies %+v", r.Latency)
	}

	for _, l := range r.Latency {
		if l.P50 > l.P99 || l.P99 > l.P999 || l.P999 <= 0 {
			t.Errorf("latencies %+v", l)
		}
	}

	f := r.Failover
	if f.Kill.N != 1 || f.Kill.P50 < 300 || f.Term.N != 1 || f.Events == 0 || f.Lost+f.Duplicates+f.OutOfOrder != 0 {
		t.Errorf("failover %+v", f)
	}
	if f.IdleRSS != -1 && (f.IdleRSS < 5 || f.IdleCPU <= 0 || f.IdleCPU > 100) {
		t.Errorf("idle: %v MiB, %v %% of a core", f.IdleRSS, f.IdleCPU)
	}
}
