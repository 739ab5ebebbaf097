package metrics

import "testing"

// Each slot of a process reports figures under a label. The figures of the process appear once, without a label.
func TestN28_SlotsHaveALabel(t *testing.T) {
	t.Parallel()
	p, slots := NewForSlots("1.2.3", []string{"0of2", "1of2"})
	p.KafkaReachable.Set(1)
	p.OplogWindow.Set(5)
	for i, s := range slots {
		s.Takeovers.Add(float64(i + 1))
		s.ObservePublish("orders", Acked, 10*(i+1))
		// This is the figure of the process.
		s.KafkaReachable.Set(0)
		s.StreamState.SetCurrent("live")
	}

	for i, name := range []string{"0of2", "1of2"} {
		if v := value(t, p, "outrelay_takeovers_total", "slot", name); v != float64(i+1) {
			t.Errorf("takeovers of %s: %v", name, v)
		}
		if v := value(t, p, "outrelay_published_total", "slot", name, "topic", "orders", "result", "acked"); v != float64(10*(i+1)) {
			t.Errorf("published by %s: %v", name, v)
		}
	}

	families, err := p.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		switch f.GetName() {
		case "outrelay_kafka_reachable", "outrelay_mongodb_reachable", "outrelay_oplog_window_seconds", "outrelay_build_info":
			if n := len(f.GetMetric()); n != 1 {
				t.Errorf("%s is there %d times", f.GetName(), n)
			}
		}
	}
	if v := value(t, p, "outrelay_kafka_reachable"); v != 1 {
		t.Errorf("Kafka reachable: %v", v)
	}

	one, err := New("1.2.3").Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range one {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "slot" {
					t.Errorf("%s of a watcher that is not split has the label slot", f.GetName())
				}
			}
		}
	}
}
