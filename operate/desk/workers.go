package desk

// liveQueues start the names of package live's queues: one for each worker, which a survey leaves out.
const liveQueues = "hopback.workers."
