package opspage

func showTopics(call *call) (any, error) { return call.use.Activity.Topics(call.ctx) }

func showRecent(call *call) (any, error) {
	return call.use.Activity.Recent(call.ctx, call.value("topic"))
}
