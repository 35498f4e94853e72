package desk

// countsPeeks is the text of WarningLimit.
const countsPeeks = "RabbitMQ before 4.3 counts each scan as a delivery, and the queue's delivery limit is %d: messages that reach it are dead-lettered or dropped"
